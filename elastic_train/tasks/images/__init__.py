"""Image preprocessing: cropping, flipping, mixing and normalising."""
