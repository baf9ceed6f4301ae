"""A page that answers as the planner does, in a browser: the planner itself, without torch."""
