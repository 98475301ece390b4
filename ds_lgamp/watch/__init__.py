"""What watches a job, whatever its host: notices that a rank dies or stands still, names it, and ends all ranks."""
