"""How versions of the weights reach SGLang servers: the forms they have, who sends them, and each server's updates."""
