"""One model over several processes: what they tell each other, and how they stay in step."""
