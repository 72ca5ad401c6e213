"""What builds and tests the image: the engine of the machine, stand-ins for images that no registry gives, pins."""
