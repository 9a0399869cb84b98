// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"log/slog"
	"os"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
)

// logger returns the configured logger, and its levels, which can be changed.
func logger(w io.Writer, c config.Common) (*slog.Logger, *loglevel.Levels) {
	levels := loglevel.New(c.LogLevel)
	all := slog.HandlerOptions{Level: slog.LevelDebug} // the levels decide
	var h slog.Handler = slog.NewTextHandler(w, &all)
	if c.LogFormat == "json" {
		h = slog.NewJSONHandler(escaper{w}, &all)
	}
	return slog.New(levels.Handler(h)), levels
}

// warnUnknown warns about environment variables that are misspelt.
func warnUnknown(log *slog.Logger) {
	warnVariables(log, config.UnknownVariables(os.Environ()))
}

func warnVariables(log *slog.Logger, reasons []string) {
	for _, r := range reasons {
		log.Warn("environment variable ignored", "reason", r)
	}
}
