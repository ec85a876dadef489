"""Times dispatch and combine over nodes: flat, hierarchical (2DH), and with deduplication at one or two levels."""
