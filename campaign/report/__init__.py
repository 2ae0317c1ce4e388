"""Terminal, HTML, Markdown and JSON views of a run."""
