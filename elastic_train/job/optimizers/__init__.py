"""How weights are updated: the optimizer, its learning rate over the steps, and the average of the weights."""
