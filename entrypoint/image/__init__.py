"""What an image's build asks of the installed project: proof that the patches fit, and labels that name them."""
