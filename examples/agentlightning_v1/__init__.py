"""Agent Lightning 1.0: an agent, a hooks file, the trainer's settings, a Kubernetes job (README.md)."""
