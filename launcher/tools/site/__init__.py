"""The calculator: a page that runs the planner itself in a browser, without torch."""
