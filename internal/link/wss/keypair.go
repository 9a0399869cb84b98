// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"crypto/tls"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"
)

// retryTime is after how long files that could not be read are tried again though they did
// not change: their owner may have, or what was short is not any more.
const retryTime = time.Minute

// keyPair is a certificate that is read again when one of its files changes.
type keyPair struct {
	cert, key string
	log       *slog.Logger

	mu    sync.Mutex
	pair  *tls.Certificate
	state [2]fileState // when the files were last read
	retry time.Time    // after a failure; zero if there was none
}

// fileState is what changes with a file.
type fileState struct {
	size int64
	time time.Time
	mode fs.FileMode
}

// get is for tls.Config.GetCertificate. While the new files cannot be read together,
// as during a renewal, the old certificate is used.
func (k *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	state := [2]fileState{stateOf(k.cert), stateOf(k.key)}
	changed := state != k.state
	if k.pair != nil && !changed && (k.retry.IsZero() || time.Now().Before(k.retry)) {
		return k.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(k.cert, k.key)
	k.state, k.retry = state, time.Time{}
	switch {
	case err == nil:
		k.pair = &pair
	case k.pair == nil:
		return nil, err
	default:
		k.retry = time.Now().Add(retryTime)
		if changed {
			k.log.Warn("cannot read the changed certificate; keeping the previous one", "cert", k.cert, "key", k.key, "err", err)
		}
	}
	return k.pair, nil
}

func stateOf(file string) fileState {
	fi, err := os.Stat(file)
	if err != nil {
		return fileState{}
	}
	return fileState{fi.Size(), fi.ModTime(), fi.Mode()}
}
