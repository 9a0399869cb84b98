// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"encoding/json"
	"net/http"

	"github.com/fairlead/fairlead/internal/config"
)

// Settings is the output of "config show -o json".
type Settings struct {
	Role     string           `json:"role"` // "agent" or "host"
	Running  bool             `json:"running"`
	File     string           `json:"file"` // from which they were read; empty for none
	Settings []config.Setting `json:"settings"`
}

// showSettings serves /v1/config.
func (s *Server) showSettings(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(Settings{Role: s.o.Role, Running: true, File: s.o.ConfigFile, Settings: s.o.Settings()})
}

// Settings returns the settings of a running agent or host.
func (c *Client) Settings(ctx context.Context) (Settings, error) {
	return ask[Settings](ctx, c, http.MethodGet, "/v1/config", nil, 0)
}
