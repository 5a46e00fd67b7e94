"""A run as its folder tells it, while it goes on and after: its story, its report, how runs differ, how they scale."""
