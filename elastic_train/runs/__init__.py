"""Views of a run from its folder, during and after the run: story, report, comparison and scaling."""
