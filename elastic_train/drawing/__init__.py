"""Build pages about runs: SVG figures, one style sheet, and templates, independent of the content."""
