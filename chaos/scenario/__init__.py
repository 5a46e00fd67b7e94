"""Scenarios: their model, the kinds of fault, schedules, and the soak that draws its own."""
