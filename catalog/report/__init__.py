"""Reports: the catalog as a page of plots, and as metadata for Datasette."""
