"""Pages about runs: SVG figures, one style sheet, one way to fill a template; nothing here knows what it draws."""
