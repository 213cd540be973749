"""The catalog's SQLite file: schema, migrations, queries, merges, timings and builds."""
