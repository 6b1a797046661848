"""The report: one self-contained HTML page, and every table of it as CSV and LaTeX. No torch, no network."""
