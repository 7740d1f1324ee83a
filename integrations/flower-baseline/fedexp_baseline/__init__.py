"""FedExP as a Flower baseline: the tasks of the paper's Table 1."""
