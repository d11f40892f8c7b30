"""Small trainable modules beside an unmodified network."""
