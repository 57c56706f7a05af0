"""Inside the training process: the rank's side of a switch, and its line to the agent."""
