"""What the router knows at this moment, for people: one document, and the page that shows it."""
