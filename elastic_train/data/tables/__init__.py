"""Import rows: files of other formats, read in chunks, checked row by row, and written as a dataset."""
