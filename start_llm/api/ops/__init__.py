"""Routes for people and monitors: status, metrics, the page, models."""
