"""Where ``init`` changes Keras: fit, callbacks, losses, metrics, layers, loss scaling."""
