# Sourced: a home that cannot be written has no ~/.cache; uv, pip and Snakemake then keep theirs in this folder.
cache=${XDG_CACHE_HOME:-${HOME:-/proc/none}/.cache}
{ mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null || export XDG_CACHE_HOME=$PWD/.cache
