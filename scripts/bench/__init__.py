"""Parts of the agent benchmark: a simulated client, scenarios, counting, servers, reports."""
