"""Makes the project's environment. Standard library only: it runs before anything is installed."""
