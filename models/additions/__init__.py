"""Small trainable modules beside an unmodified network; base.py says what they are, registry.py which there are."""
