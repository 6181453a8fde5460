"""Rollouts as a gateway knows them: the fold of their events, and the ones held in memory."""
