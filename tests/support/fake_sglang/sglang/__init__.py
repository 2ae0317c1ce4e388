"""A stand-in for the SGLang package: its command line, HTTP pages and log lines, no model and no GPU."""
