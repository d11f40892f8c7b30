"""Small trainable modules attached to an unmodified network."""
