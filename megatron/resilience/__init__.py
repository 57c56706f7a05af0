"""What keeps a job running: launching, watching, later replacing machines. Controller and agent import no torch."""
