"""Pictures of a DGraph: DOT, Mermaid, and a page for people."""
