"""A small kernel as a newcomer writes it, and six usual mistakes in it, each as a Subject of its own."""
