"""Everything that touches weights or a device."""
