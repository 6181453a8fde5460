"""Wire formats of the model APIs: pure translations to and from `turnfold.gateway.calls`."""
