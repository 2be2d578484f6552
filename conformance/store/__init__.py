"""A store of many runs: records as Parquet files that DuckDB, pandas and others read."""
