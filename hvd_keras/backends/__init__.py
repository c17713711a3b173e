"""What depends on the backend of Keras: a module, or a package, for each."""
