"""What trains beside frozen weights: how it is chosen, saved, and merged into ordinary weights."""
