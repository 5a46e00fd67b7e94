"""What a run sees of itself and what that costs, one module for each part."""
