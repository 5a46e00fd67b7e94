"""What a rank's memory is taken by: looked at now and then, and written down where it runs out."""
