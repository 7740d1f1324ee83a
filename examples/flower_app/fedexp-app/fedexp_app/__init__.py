"""FedExP on Flower: an app to copy."""
