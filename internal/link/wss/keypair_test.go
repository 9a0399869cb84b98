// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"bytes"
	"crypto/tls"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A certificate that is renewed is used without a restart, and one that is broken is
// not.
func TestRenewedCertificate(t *testing.T) {
	ca := newAuthority(t, "test")
	certFile, keyFile := ca.issue(t, localhost())
	k := &keyPair{cert: certFile, key: keyFile, log: slog.New(slog.DiscardHandler)}
	first, err := k.get(nil)
	if err != nil {
		t.Fatal(err)
	}
	newCert, newKey := ca.issue(t, localhost())
	copyFile(t, newCert, certFile) // its key is still the old one
	if got, err := k.get(nil); err != nil || got != first {
		t.Errorf("%p, %v", got, err)
	}
	copyFile(t, newKey, keyFile)
	got, err := k.get(nil)
	if err != nil || got == first {
		t.Errorf("the old certificate, %v", err)
	}
	if again, _ := k.get(nil); again != got {
		t.Error("read again without need")
	}
}

// Files that cannot be read are logged once for each change, and not read for each connection.
func TestBrokenCertificateIsLoggedOncePerChange(t *testing.T) {
	ca := newAuthority(t, "test")
	synctest.Test(t, func(t *testing.T) {
		certFile, keyFile := ca.issue(t, localhost())
		var log bytes.Buffer
		k := &keyPair{cert: certFile, key: keyFile, log: slog.New(slog.NewTextHandler(&log, nil))}
		first, err := k.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		good, err := os.ReadFile(certFile)
		if err != nil {
			t.Fatal(err)
		}
		state := stateOf(certFile)
		get := func(what string, old bool, lines int) *tls.Certificate {
			t.Helper()
			got, err := k.get(nil)
			if err != nil || (got == first) != old {
				t.Errorf("%s: the old certificate: %v, %v", what, got == first, err)
			}
			if n := strings.Count(log.String(), "keeping the previous one"); n != lines {
				t.Errorf("%s: %d lines, want %d:\n%s", what, n, lines, log.String())
			}
			return got
		}
		write := func(content []byte, at time.Time) {
			t.Helper()
			if err := os.WriteFile(certFile, content, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(certFile, at, at); err != nil {
				t.Fatal(err)
			}
		}
		broken := bytes.Repeat([]byte("x"), len(good))
		later := state.time.Add(time.Minute)
		write(broken, later)
		for range 3 {
			get("broken", true, 1)
		}
		write(broken, later.Add(time.Minute))
		get("broken again", true, 2)
		write(good, later.Add(time.Minute)) // with the same time, as of a file that is readable now
		get("not tried again yet", true, 2)
		time.Sleep(retryTime)
		get("tried again", false, 2)
	})
}
