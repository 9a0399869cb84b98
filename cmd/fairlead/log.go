// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"log/slog"
	"os"

	"github.com/fairlead/fairlead/internal/config"
)

// logger returns the configured logger, and its level, which can be changed.
func logger(w io.Writer, c config.Common) (*slog.Logger, *slog.LevelVar) {
	var level slog.LevelVar
	level.Set(c.LogLevel)
	o := slog.HandlerOptions{Level: &level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(escaper{w}, &o)), &level
	}
	return slog.New(slog.NewTextHandler(w, &o)), &level
}

// warnUnknown warns about misspelt environment variables.
func warnUnknown(log *slog.Logger) {
	for _, w := range config.UnknownVariables(os.Environ()) {
		log.Warn("environment variable ignored", "reason", w)
	}
}
