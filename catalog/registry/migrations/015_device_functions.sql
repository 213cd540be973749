-- How many device functions a library has: one row may be compiled to several.

ALTER TABLE artifact ADD COLUMN device_functions INTEGER;
