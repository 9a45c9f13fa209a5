"""The live page of a service: `overlord dashboard`, or `launch(dashboard=PORT)`."""
