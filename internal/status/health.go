// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/config/loglevel"
)

// ready serves /readyz.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	reason := ""
	for _, src := range s.o.Provider.Sources() {
		if src.State == "starting" {
			reason = "source " + src.Name + " is starting"
		}
	}
	if s.o.Ready != nil {
		reason = s.o.Ready()
	}
	if reason != "" {
		text(w, http.StatusServiceUnavailable, reason)
		return
	}
	text(w, http.StatusOK, "ready")
}

func (s *Server) logLevel(w http.ResponseWriter, _ *http.Request) {
	text(w, http.StatusOK, loglevel.Name(s.o.Level.Level()))
}

// setLevel sets the level of the whole: permanently, or for the time that for says.
func (s *Server) setLevel(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	q := loglevel.Request{Level: strings.TrimSpace(string(b))}
	if v := r.URL.Query().Get("for"); v != "" && err == nil {
		if q.Lasts, err = time.ParseDuration(v); err != nil || q.Lasts == 0 {
			err = fmt.Errorf("for %q: want a duration such as 10m, %s to %s", v, loglevel.LastsMin, loglevel.LastsMax)
		}
	}
	if err == nil {
		err = s.o.Level.Set(q, s.o.Logger)
	}
	if err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	text(w, http.StatusOK, q.Level)
}

func (s *Server) logLevels(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.o.Level.State())
}

// decodeLevel reads a request into q, or answers why it cannot.
func decodeLevel(w http.ResponseWriter, r *http.Request, q any) bool {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields() // a newer client must not have half of its request carried out
	if err := dec.Decode(q); err != nil {
		text(w, http.StatusBadRequest, fmt.Sprintf("not a request for a log level: %v", err))
		return false
	}
	return true
}

// setLevels sets levels of components.
func (s *Server) setLevels(w http.ResponseWriter, r *http.Request) {
	var q loglevel.Request
	if !decodeLevel(w, r, &q) {
		return
	}
	if err := s.o.Level.Set(q, s.o.Logger); err != nil {
		text(w, http.StatusBadRequest, err.Error())
		return
	}
	s.logLevels(w, r)
}
