// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"io"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
)

// carry opens a flow and sends payload each way, with half-close.
func carry(tb testing.TB, host, agent link.Session, payload []byte) {
	tb.Helper()
	done := make(chan error, 1)
	go func() {
		st, err := agent.Accept(tb.Context())
		if err == nil {
			_, err = io.Copy(st, st)
		}
		if err == nil {
			err = st.Close()
		}
		done <- err
	}()
	st, err := host.Connect(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	go func() {
		_, _ = st.Write(payload)
		_ = st.CloseWrite()
	}()
	h := sha256.New()
	if _, err := io.Copy(h, st); err != nil {
		tb.Fatal(err)
	}
	if err := <-done; err != nil {
		tb.Fatal(err)
	}
	if want := sha256.Sum256(payload); !bytes.Equal(h.Sum(nil), want[:]) {
		tb.Error("the echo differs")
	}
}

func TestSessionCarriesFlows(t *testing.T) {
	r := start(t, newAuthority(t, "test"), nil)
	host, agent := r.connect(r.dialer(nil))
	if p := host.Peer(); p.Proof != "token" || p.Name != "agent" {
		t.Errorf("peer %+v", p)
	}
	payload := make([]byte, 4<<20)
	_, _ = rand.Read(payload)
	carry(t, host, agent, payload)
}
