"""The row schema, journals, Parquet files, and reading a run."""
