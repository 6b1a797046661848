"""What the Snakefile needs beside its rules: the resolved plan, the identity of environments, resuming."""
