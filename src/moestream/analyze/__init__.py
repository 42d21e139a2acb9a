"""What a trace says: how skewed and how local routing is, and what could be known of it in advance."""
